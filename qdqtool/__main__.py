from qdqtool.cli import main

main()
