"""`outrider verify`: checks this runtime's promises on this device, with these models.

`certify` makes the checks of the certificate and `exact` compares samples with the exact distribution. Modes and
prompts are those of `outrider_bench`.
"""
