"""Recipes: TOML files of options, and the makers of what they need."""
