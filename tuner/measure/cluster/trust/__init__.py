"""Trust in a fleet: certificates of roles, revocation, rights of a role, restricted messages."""
