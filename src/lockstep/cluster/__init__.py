"""Roles and the dial: which role runs on which devices, and how a leaf is cut there."""
