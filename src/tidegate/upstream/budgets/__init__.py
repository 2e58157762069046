"""Leave to send under the budgets that all processes share."""
