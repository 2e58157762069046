"""Verbs of operators: jobs of all tenants, operations over many jobs, and the audit."""
