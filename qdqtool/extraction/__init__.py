"""Small models that show a finding, a prediction or a failing build of a large one."""
