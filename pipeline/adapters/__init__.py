"""The sides of the ports that face the world: one file each."""
