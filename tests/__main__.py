import sys

if __name__ == "__main__":
    try:
        import pytest

        sys.exit(pytest.main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
