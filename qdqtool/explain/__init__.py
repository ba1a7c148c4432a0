"""What is known about each finding, and findings made from the simulator's refusals."""
