"""CUDA sources, as package data; see README.md beside this file. No Python lives here."""
