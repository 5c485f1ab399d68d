"""The ground that every other package stands on. It imports none of them."""
