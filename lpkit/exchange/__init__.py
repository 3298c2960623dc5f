"""Read and write models of other programs: folders of transformers and adapters of peft."""
