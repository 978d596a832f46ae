"""Images and videos: decoding, resizing, cropping, writing."""
