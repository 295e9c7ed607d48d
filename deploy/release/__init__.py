"""What a release is made of: the images and their bills of materials, the notes, and the versions that must agree."""
