"""Permits to send under budgets that all processes share, and their settlement."""
