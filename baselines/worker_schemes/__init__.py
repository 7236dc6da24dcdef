"""The modular training schemes of Bou et al. (2023), https://arxiv.org/abs/2007.02622, on Ray."""
