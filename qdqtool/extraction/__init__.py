"""Small models out of large ones: cut to what a finding depends on, shrunk, and made fit to be sent."""
