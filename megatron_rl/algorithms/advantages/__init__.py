"""Advantages: group baselines made by the controller, token-level estimates made on the trainer ranks."""
