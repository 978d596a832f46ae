"""Weight formats: the file and name of each tensor in the layouts of other libraries."""
