export default {
  extends: ['stylelint-config-standard'],
  plugins: ['stylelint-csstree-validator'],
  rules: {
    'csstree/validator': true,
    'custom-property-pattern': '^(accel-nb|jp|vscode)-[A-Za-z0-9-]+$',
    // Classes of our own are accel-nb-*; jp-*, vscode-* and u-* belong to JupyterLab, VS Code and uPlot.
    'selector-class-pattern': '^(accel-nb|jp|u|vscode)-[A-Za-z0-9-]+$|^uplot$',
    'no-descending-specificity': null
  }
};
