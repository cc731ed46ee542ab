"""Test suites that users of the package run against their own implementations."""
