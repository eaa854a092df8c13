"""The scheduler as seen from outside: its clients, what they say of our jobs, its limits, and a site's profile."""
