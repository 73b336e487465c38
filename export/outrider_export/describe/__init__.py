"""What is known of a model before it is converted: its architecture, shape and the plan of its conversion."""
