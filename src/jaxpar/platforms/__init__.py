"""What is known of each kind of chip, and of its compiler."""
