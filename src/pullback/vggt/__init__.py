"""Everything about VGGT, whose samples are several views of one scene. A newcomer may skip this room."""
