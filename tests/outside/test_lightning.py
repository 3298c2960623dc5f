"""`watch` in Lightning's training loop, if Lightning is installed (tested with 2.6)."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lpkit
from lpkit.modules import callbacks

lightning = pytest.importorskip("lightning")


class Squares(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.filterwarnings("ignore")     # a warning of Lightning itself
def test_a_trainer_of_lightning_is_watched():
    model, watching = Squares(), callbacks.lightning()
    lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False,
                      enable_model_summary=False, callbacks=[watching]).fit(model,
                          DataLoader(TensorDataset(torch.randn(160, 64)), 16))
    seen = watching.seen
    predicted = lpkit.predict(model.net, torch.randn(16, 64),
                              loss=lambda net, x: net(x).square().mean(), machine="h100")
    assert (seen.updates == 20 and seen.footprint.rows["weights"]
            == predicted.footprint.rows["weights"])
    assert seen.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.005)
