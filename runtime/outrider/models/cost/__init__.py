"""What models' calls cost: the table that they teach, the measurement that it begins with, and its file."""
