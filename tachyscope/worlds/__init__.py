"""Small worlds whose every frame is known exactly."""
