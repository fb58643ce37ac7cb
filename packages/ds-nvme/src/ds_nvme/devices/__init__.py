"""Memory that the host can't address: how bytes get there and back."""
