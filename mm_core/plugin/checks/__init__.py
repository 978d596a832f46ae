"""What components are held against: the contract of their kind, their config, their target's file."""
