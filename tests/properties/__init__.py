"""Random training loops as text, trained plainly and on workers: each is equal, told or refused."""
