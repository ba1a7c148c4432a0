"""What every part of the program uses: records, options, texts, manners of a process, limits."""
