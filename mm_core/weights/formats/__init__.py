"""Weight formats: which file and name each tensor has in the layouts of other libraries."""
