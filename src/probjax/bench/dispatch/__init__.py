"""The suite `dispatch`: many short calls of attention, as small models make them, against JAX's other
ways.
"""
