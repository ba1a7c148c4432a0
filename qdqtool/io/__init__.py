"""Reading and writing of files that may be damaged, packed, huge or hostile."""
