"""The values that flow between stages. They are frozen, and they import no stage."""
