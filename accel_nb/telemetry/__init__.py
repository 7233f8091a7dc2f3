"""What a run tells about itself: events, the ring that carries them, meters that make them."""
