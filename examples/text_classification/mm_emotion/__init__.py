"""Six emotions of short texts, in Chinese and English."""
