"""The suite `unet`: UNets on images, the reference file's narrow one and a real one."""
