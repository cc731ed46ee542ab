"""Tests of the ucp command."""
