"""Planners: who holds, writes and reads which box of which tensor."""
