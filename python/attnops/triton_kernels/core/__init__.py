"""What the ops of this package share: the attention kernel, its tiles and its launch."""
