"""What is installed: optional packages, and the folders that travel with the package."""
