"""Trust in a fleet: certificates with roles, revocation, permissions of a role, restricted unpickling. From outside only the commands
import it.
"""
