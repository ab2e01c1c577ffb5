"""Code that experiments share, such as results files, timing, meshes and the cases."""
