"""Device types behind one seam."""
