"""What every room needs.

The errors of the package and where in a model's source they arose; files that appear whole or not
at all, and their hashes; what CMake built; the keys of the policy file; the version.

May include: no other room.
"""
