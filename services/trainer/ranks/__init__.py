"""The ranks of one trainer: who they are, how rank 0's calls reach the others, how all end when one dies."""
