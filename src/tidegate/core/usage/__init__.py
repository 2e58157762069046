"""Usage: what calls will take and took, in tokens and in money."""
