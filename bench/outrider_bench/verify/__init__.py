"""`outrider verify`: checks this runtime's promises on this device, with these models.

`certify` makes the checks of the certificate; `exact` compares samples with the exact distribution;
`fidelity` compares a model with the checkpoint that it came from. Modes and prompts are those of `outrider_bench`.
"""
