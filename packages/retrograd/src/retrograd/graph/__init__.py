"""The values that flow between stages. They are frozen and import no stage."""
