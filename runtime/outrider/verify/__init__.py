"""What `outrider verify` asks: does this runtime keep its promises on this device, with these models?

`certify` makes the checks of the certificate; `exact` compares samples with the distribution that they should have;
`fidelity` judges a model by the checkpoint that it came from. Modes and prompts are those of `outrider.bench`.
"""
