"""The image and the Compose file in a real engine."""
