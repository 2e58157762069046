"""Where bytes lie: one module per blob store, strangers to one another. Only `service.py` names one of them."""
