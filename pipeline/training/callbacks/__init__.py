"""Callbacks: each one policy, called at the end of optimiser steps in the order in which ``train`` lists them."""
